"""Proof of implementations on the device that runs them, and the choice among what was proved.

A GPU that nobody has tested decides for itself: the first call of its kind compares each candidate
with the reference, in a process of its own, and times what passed. `decide` is the way in.
"""
