"""From files of many formats to documents."""
