-- Every step at which a recorded quantity was NaN or infinite: marks for the curves.
-- Source: nonfinite_values_by_step.
CREATE OR REPLACE MACRO nonfinite_steps() AS TABLE
SELECT
    run, -- run directory
    step, -- optimizer updates
    source, -- table: tensors, steps or evaluations
    subject, -- name of the tensor, column of steps, or split
    kind -- weight, activation, loss, activation_gradient, gradient or update
FROM nonfinite_values_by_step()
ORDER BY run, step, order_in_step;
