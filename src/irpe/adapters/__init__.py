"""Host libraries: one file for each, over one way to equip a model."""
