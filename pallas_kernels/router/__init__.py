"""Router: which k experts each row goes to, and with what weight."""

from .api import explain, fake_balance, router

__all__ = ["explain", "fake_balance", "router"]
