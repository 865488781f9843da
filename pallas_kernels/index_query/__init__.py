"""Index queries and head weights of a step's rows, in the form that the index scorers take (spec/model.md section 7)."""

from .api import FORMS, explain, index_query

__all__ = ["FORMS", "explain", "index_query"]
