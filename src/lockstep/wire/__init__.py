"""How each dialect spells requests and results. A dialect is a file; decoding is strict."""
