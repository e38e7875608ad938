"""Extraction: which training text a model writes by itself, beside text that it never read.

Each rate stands beside that of controls, because frequent phrases are "extracted" from any model.
"""
