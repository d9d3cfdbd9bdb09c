"""Names of the published package (histocc of Dahl, Johansen and Vedel, 2024, arXiv 2402.13604) that are not
ours, as thin calls of what is."""
