"""Rendering of results: figures as SVG inside a page."""
