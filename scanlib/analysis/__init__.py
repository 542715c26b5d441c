"""What a loop is: its dependences, whether it is elementwise, which recurrence family it is of."""
