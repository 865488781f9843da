"""The serving engine: requests in, tokens out, batched continuously around the jitted step."""

from dsv41_jax.engine.core import Engine
from dsv41_jax.engine.limits import Limits
from dsv41_jax.engine.metrics import EngineMetrics, Histogram
from dsv41_jax.engine.request import Request, Status
from dsv41_jax.engine.signals import shutdown_on_signals

__all__ = ["Engine", "EngineMetrics", "Histogram", "Limits", "Request", "Status", "shutdown_on_signals"]
