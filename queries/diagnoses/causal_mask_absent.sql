-- Does attention see the future although the run declares a causal mask?
-- Source: an exact invariant. A masked probability is exactly 0.0 and so is the sum of such: any mass is proof.
-- A NaN mass is no proof, it is nonfinite_value's. Mass on the next key only is causal_mask_off_by_one's. Whether
-- evaluation shares the fault shows in its loss.
CREATE OR REPLACE MACRO causal_mask_absent(
    mass_threshold := 0.0 -- 0..1; the invariant is exact, so there is nothing to tolerate
) AS TABLE
WITH leaks AS (
    SELECT attention.run, step, layer, head, future_mass, future_mass_beyond_next
    FROM attention
    JOIN runs ON runs.run = attention.run AND runs.mask_type = 'causal'
    WHERE isfinite(future_mass) AND future_mass > mass_threshold
),
worst_heads AS (
    SELECT
        run,
        min(step) AS first_step,
        max(step) AS last_step,
        max(future_mass) AS mass,
        arg_max(layer, future_mass) AS layer,
        arg_max(head, future_mass) AS head,
        count(DISTINCT (layer, head)) AS head_count
    FROM leaks
    GROUP BY run
    -- where the mass beyond the next key was not recorded nothing tells the two faults apart
    HAVING coalesce(max(future_mass_beyond_next) FILTER (WHERE isfinite(future_mass_beyond_next)), 1) > 0
),
recorded_heads AS (
    SELECT run, count(DISTINCT (layer, head)) AS all_head_count FROM attention GROUP BY run
),
primary_losses AS (
    SELECT evaluations.run, split, step, loss_sum / nullif(token_count, 0) AS loss
    FROM evaluations
    JOIN runs ON runs.run = evaluations.run AND evaluations.split = runs.primary_split
    WHERE rank = 0 AND coalesce(repeat, 0) = 0 AND isfinite(loss_sum)
),
last_evaluations AS (
    SELECT
        run, any_value(split) AS split, arg_max(loss, step) AS loss, max(step) AS step,
        min(loss) AS lowest_loss, arg_min(step, loss) AS lowest_step
    FROM primary_losses
    GROUP BY run
),
last_training AS (
    SELECT steps.run, avg(train_loss) FILTER (WHERE isfinite(train_loss)) AS loss
    FROM steps
    JOIN last_evaluations USING (run)
    WHERE rank = 0 AND steps.step < last_evaluations.step AND steps.step >= last_evaluations.step - 50
    GROUP BY steps.run
),
floors AS (
    SELECT run, split, loss AS floor FROM reference_losses WHERE reference = 'entropy_floor'
),
consequences AS (
    SELECT
        worst_heads.run,
        CASE
            WHEN evaluated.lowest_loss < floor - 1e-3 THEN format(
                'training and evaluation share the missing mask: {} loss {:.3g} nats/token at step {} is below the '
                || 'entropy floor {:.3g}, which no causal model can pass',
                evaluated.split, evaluated.lowest_loss, evaluated.lowest_step, floor
            )
            -- Half the loss, not a shade of it: dropout and overfitting move the two apart by less than that.
            WHEN evaluated.loss > 2 * trained.loss AND evaluated.loss - trained.loss > 0.1 THEN format(
                'evaluation masks correctly: {} loss {:.3g} nats/token versus training {:.3g} at step {}',
                evaluated.split, evaluated.loss, trained.loss, evaluated.step
            )
            WHEN evaluated.loss IS NOT NULL AND trained.loss IS NOT NULL THEN format(
                'the losses do not tell yet whether evaluation sees the future too: {} {:.3g} nats/token versus '
                || 'training {:.3g} at step {}',
                evaluated.split, evaluated.loss, trained.loss, evaluated.step
            )
            ELSE 'no evaluation of the primary split tells whether evaluation sees the future too'
        END AS consequence
    FROM worst_heads
    LEFT JOIN last_evaluations AS evaluated USING (run)
    LEFT JOIN last_training AS trained USING (run)
    LEFT JOIN floors ON floors.run = worst_heads.run AND floors.split = evaluated.split
)
SELECT
    run, -- run directory
    first_step, -- optimizer updates
    last_step, -- optimizer updates
    format('layer {} head {}', layer, head) AS subject, -- head with the most mass
    mass AS observed, -- 0..1, attention that a real query gives to later keys
    CAST(mass_threshold AS DOUBLE) AS threshold, -- 0..1
    format('{} of {} heads see later keys; ', head_count, all_head_count) || consequence AS detail -- text
FROM worst_heads
JOIN consequences USING (run)
JOIN recorded_heads USING (run)
ORDER BY run;
