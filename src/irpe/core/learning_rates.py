"""Learning rates of positions, as multiples of the model's.

Tables start at zero and Adam moves an element by at most the learning rate in a step, so in a short
training a rate that suits the weights leaves them next to nothing. The values were chosen on
held-out training images (`python -m benchmarks.table_rates`, docs/explanation/learning-rates.md).
"""

TABLE_LR = 5.0  # of the tables of relative encodings
ABSOLUTE_LR = 1.0  # of a learned absolute encoding
