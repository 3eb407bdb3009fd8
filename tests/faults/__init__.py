"""Runs that are disturbed: what is killed, stopped, cut off or damaged, and streams that must not show it."""

import os

# Read when Ray is imported, by whichever module comes first: listen on loopback only, and tell nobody.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
