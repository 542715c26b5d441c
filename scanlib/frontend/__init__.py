"""The functions users call: they turn a step function and its arguments into a loop."""
