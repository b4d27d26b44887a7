"""A `Writer` for the library of each tracker."""
