"""Loops made smaller: what nobody reads goes, what is there twice becomes one, loops are merged."""
