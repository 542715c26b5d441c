"""How long things are: what is known of lengths without values; see README.md here."""
