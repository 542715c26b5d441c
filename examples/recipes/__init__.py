"""Recipes: common loops in a few lines, each a script of its own that draws what it found."""
