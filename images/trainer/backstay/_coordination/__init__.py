"""Which gradients make an update, in what order, and what else happens at that version: decided purely, without I/O.

Everything here is plain data and arithmetic: messages come in, decisions go out, the time is an argument. So the
promises T1, T2, T3 and T5 can be tested over every interleaving, and a standby can hold the same state (T6).
"""
