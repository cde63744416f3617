"""The live page of a gateway: its static files, and the few routes behind them."""
