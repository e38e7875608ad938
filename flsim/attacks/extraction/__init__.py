"""Extraction: training text that a model generates, compared with text outside training.

Each rate is compared with that of controls, because frequent phrases are "extracted" from any model.
"""
