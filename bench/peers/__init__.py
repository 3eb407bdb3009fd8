"""The same work written for each loader, as well as we know how. All share `documents`, `packing` and `pictures`."""
