"""The Ops that loops are lowered to."""
