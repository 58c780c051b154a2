"""How a model is split over ranks, and how the ranks talk."""
