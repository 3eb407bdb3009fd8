"""Steps that never ran: lengths as published, and a model of time and memory."""
