"""Reads files of many formats as documents."""
