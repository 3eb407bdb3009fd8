"""The engine for all cores of one machine: loader hosts and data constructors in processes of their own."""

from overlord.runtime.processes.engine import Processes

__all__ = ["Processes"]
