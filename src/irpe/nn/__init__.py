"""Modules: the tables of an encoding, and a self-attention that has one."""
