//! The protocol between HAProxy and its agents (SPOP, HAProxy `doc/SPOE.txt`).
