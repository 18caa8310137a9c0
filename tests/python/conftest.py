"""Fixtures of the tests of the Python library."""

import pytest

import kinlens
from kinlens.embedder.bundle import Bundle
from kinlens.embedder.session import OnnxEmbedder


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Bundle) -> OnnxEmbedder:
    return kinlens.load_bundle(tiny_bundle.path)
