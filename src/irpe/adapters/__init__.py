"""Gives existing models of other libraries their encodings; `hosts` knows the libraries."""
