"""Entry of a hyper-connection site: collapse, norm and the streams' own root mean square (spec/model.md section 3)."""

from .api import explain, hyper_enter

__all__ = ["explain", "hyper_enter"]
