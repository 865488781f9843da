"""Exit of a hyper-connection site, and what the next site's entry needs of the streams (spec/model.md section 3)."""

from .api import Ahead, enter_next, explain, hyper_leave, site_to_site

__all__ = ["Ahead", "enter_next", "explain", "hyper_leave", "site_to_site"]
