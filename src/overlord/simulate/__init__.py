"""Simulation of steps that never ran: document lengths as published, and a model of time and memory."""
