"""Corpora by name, local files as their equals, and the documents both give."""

from ctxext.data.corpora import CORPORA, Corpus, open_corpus
from ctxext.data.documents import Document, documents_hash

__all__ = ["CORPORA", "Corpus", "Document", "documents_hash", "open_corpus"]
