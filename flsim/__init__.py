"""A distributed simulation platform for memorization in federated learning.

dump -> records -> vocabulary -> balanced users -> shards            flsim.data
shards + canary spec -> planted overlay + roster -> IID twin         flsim.canaries
each round: cohort -> local SGD per user -> sum -> server step       flsim.training, algorithms; clients, server
checkpoint -> RS, BS, exposure, utility -> rows                      flsim.memorization, evaluation
rows -> tables, plots                                                flsim.results
"""
