"""The Flower ServerApp, its loop of rounds, and the launch of both apps on Ray."""
