"""What a loop computes beside its recurrence, for all steps at once, and when that pays."""
