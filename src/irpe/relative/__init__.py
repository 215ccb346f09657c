"""Makes a trained model with an absolute encoding relative, and says what is lost.

A room above the adapters: it equips copies of a model through `irpe.equip` and listens where any
equipped attention calls its encoding, so it knows models of every host and no host library. Its
picture is drawn by `viz`, which is why it is above that room; nothing but commands needs it.
"""
