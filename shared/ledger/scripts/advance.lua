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

local out, followed, moved, held, gangs = {}, {''}, false, {}, {}

local function step(pod, lease, value, state)
  lease[L_STATE], lease[L_VERSION], lease[L_EXPIRES] = state, next_version(), 0
  value = put_changed(pod, lease, value)
  moved = true
  if state == BOUND then
    held[#held + 1] = pod
    held[#held + 1] = value
    local _, _, _, gang = about(lease, value)
    if gang ~= '' then gangs[gang] = true end
  end
  return value
end

-- A gang is committed as a whole: from the first binding on, none of its reservations ends by itself.
local function commit(gang)
  local pods = {}
  for _, entry in ipairs(call('ZRANGEBYLEX', P .. 'ganged', gang_range(gang))) do
    pods[#pods + 1] = string.match(entry, '([^|]*)$')
  end
  fetch('leases', pods)
  for _, pod in ipairs(pods) do
    local value = leases[pod]
    local lease = value and opened(value)
    if lease and lease[L_STATE] == RESERVED then step(pod, lease, value, BOUND) end
  end
end

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
    value = step(pod, lease, value, to == 'bound' and BOUND or ACTIVE)
  end
  out[i] = lease and lease[L_VERSION] or 0
  if move ~= nil then
    out[i] = -1
    followed[#followed + 1] = value
  end
end
for gang in pairs(gangs) do commit(gang) end
if moved then flush(to) end
journal('held', held)
followed[1] = pack(out)
return followed
