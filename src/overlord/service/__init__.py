"""Steps over Arrow Flight, for trainers in other processes. Arrow and msgspec on the wire, never pickle."""
