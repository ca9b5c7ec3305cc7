"""Tests of the API server."""
