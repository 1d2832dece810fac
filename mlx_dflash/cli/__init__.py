"""The command line: a thin skin over the public API. Text goes to stdout, everything else to stderr."""
