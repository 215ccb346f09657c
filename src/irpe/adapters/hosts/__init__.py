"""One folder or file for each library whose models can be equipped."""
