"""Plan for hardware that is described in files instead of measured."""
