-- Move leases on: arguments are {'bound', rows of {pod, version read, first fence}} or {'active',
-- rows of {pod}}.
-- Answers numbers, and the leases they point to. Per row: -1, the lease follows; or, if it cannot go
-- there, the stored version, 0 without a lease.
local to, rows = A[1], A[2]

local pods = {}
for i, row in ipairs(rows) do pods[i] = row[1] end
fetch('leases', pods)

-- True: it moves. False: it is there already, by the same reservation. Nil: it cannot.
local function bound(lease, value, version, fence)
  if lease[L_STATE] == RESERVED then
    if lease[L_VERSION] == version then return true end
    return nil
  end
  if lease[L_ORIGIN] == version or lease[L_VERSION] == version
    or grants_of(lease, value)[2] == fence then
    return false
  end
end

local function active(lease)
  if lease[L_STATE] == BOUND then return true end
  if lease[L_STATE] == ACTIVE then return false end
end

local out, followed, moved, held = {}, {''}, false, {}
for i, row in ipairs(rows) do
  local pod = row[1]
  local value, lease, move = leases[pod], nil, nil
  if value then
    lease = opened(value)
    if to == 'bound' then
      move = bound(lease, value, row[2], row[3])
    else
      move = active(lease)
    end
  end
  if move then
    lease[L_STATE], lease[L_VERSION] = to == 'bound' and BOUND or ACTIVE, next_version()
    lease[L_EXPIRES] = 0
    value = put_changed(pod, lease, value)
    moved = true
    if to == 'bound' then
      held[#held + 1] = pod
      held[#held + 1] = value
    end
  end
  out[i] = lease and lease[L_VERSION] or 0
  if move ~= nil then
    out[i] = -1
    followed[#followed + 1] = value
  end
end
if moved then flush(to) end
journal('held', held)
followed[1] = pack(out)
return followed
