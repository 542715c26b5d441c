"""The test suite; a package so that its modules can share the reference loop."""
