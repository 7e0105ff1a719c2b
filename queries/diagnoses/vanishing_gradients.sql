-- Does an early block get far smaller gradients than a later one, step after step?
-- Source: products of Jacobians shrink or grow exponentially with depth (Hochreiter 1991; Pascanu et al. 2013). Only
-- the ratio within a step counts: a converged model has small gradients everywhere, and Adam rescales them.
CREATE OR REPLACE MACRO vanishing_gradients(
    share_threshold := 0.03, -- 1, root mean square of the earlier block / the largest; 0.4 and more in healthy runs
    window_rows := 20 -- recorded steps
) AS TABLE
WITH sizes AS (
    SELECT
        run, step, layer, root_mean_square, share,
        arg_max(layer, root_mean_square) OVER (PARTITION BY run, step) AS largest_layer,
        max(root_mean_square) OVER (PARTITION BY run, step) AS largest
    FROM gradient_size_by_layer()
),
windows AS (
    SELECT
        run, step, layer, root_mean_square, largest, largest_layer,
        median(share) OVER last_rows AS share,
        bool_and(layer < largest_layer) OVER last_rows AS is_earlier,
        count(*) OVER last_rows AS row_count,
        min(step) OVER last_rows AS window_step
    FROM sizes
    WHERE root_mean_square > 0 -- exact zeros are detached_branch's
    WINDOW last_rows AS (
        PARTITION BY run, layer ORDER BY step ROWS BETWEEN window_rows - 1 PRECEDING AND CURRENT ROW
    )
)
SELECT
    run, -- run directory
    min(window_step) AS first_step, -- optimizer updates
    max(step) AS last_step, -- optimizer updates
    format('layer {}', layer) AS subject, -- block
    min(share) AS observed, -- 1, smallest median ratio to the largest block
    any_value(CAST(share_threshold AS DOUBLE)) AS threshold, -- 1
    format(
        'gradients of {:.3g} root mean square where layer {} has {:.3g} at step {}', arg_min(root_mean_square, share),
        arg_min(largest_layer, share), arg_min(largest, share), arg_min(step, share)
    ) AS detail -- text
FROM windows
WHERE row_count = window_rows AND is_earlier AND share < share_threshold
GROUP BY run, layer
ORDER BY run, layer;
