-- Advance leases to their next state. Arguments: {'bound', rows of {pod, version that the caller read, device and fence
-- of its first share ('' and -1 without shares)}} or {'active', rows of {pod, node}}: a lease on another node stays.
-- Returns numbers, and leases. Per row: -1 and the lease; or, if the life cycle does not allow it, the stored version,
-- or 0 without a lease on that node.
local constants = require('constants')
local layouts = require('layouts')
local lease = require('lease')
local records = require('records')
local journal = require('tenures')
local values = require('values')
local waiting = require('waiting')
local writes = require('writes')
local encode = cmsgpack.pack
local DEMAND, NUMBERS, REQUEST = layouts.DEMAND, layouts.NUMBERS, layouts.REQUEST

-- Is this the reservation that the caller read?
local function is_same_reservation(of_pod, version, device, fence)
  local numbers = of_pod.numbers
  if numbers[NUMBERS.RESERVED_VERSION] == version or numbers[NUMBERS.VERSION] == version then return true end
  local first_device, first_fence = lease.first_grant(of_pod)
  return first_device == device and first_fence == fence
end

-- True: the lease moves. False: it went there before, from the same reservation. Nil: it cannot.
local function moves(of_pod, row, to_state)
  local state = of_pod.numbers[NUMBERS.STATE]
  if constants.MAY_BECOME[state][to_state] then
    if to_state == constants.BOUND and of_pod.numbers[NUMBERS.VERSION] ~= row[2] then return nil end
    return true
  end
  local is_there = state == to_state
  if to_state == constants.BOUND then is_there = is_same_reservation(of_pod, row[2], row[3], row[4]) end
  if is_there then return false end
end

-- Move a lease. Pods with leases that are bound now are added to `tenures`, and their gangs to `gangs`.
local function move(pod, of_pod, to_state, tenures, gangs)
  lease.change_state(of_pod, to_state)
  records.put_lease(pod, of_pod)
  if to_state == constants.BOUND then
    values.append(tenures, pod, of_pod.value)
    local gang = of_pod.request[REQUEST.GANG]
    if gang ~= '' then gangs[gang] = true end
  end
end

-- A gang is bound as a whole: once one of its pods is, none of its reservations expires.
local function bind_gang(gang, tenures)
  local members = waiting.gang_pods('gang-leases', gang)
  records.fetch('leases', members)
  for _, pod in ipairs(members) do
    local of_pod = records.leases[pod]
    if of_pod and constants.MAY_BECOME[of_pod.numbers[NUMBERS.STATE]][constants.BOUND] then
      move(pod, of_pod, constants.BOUND, tenures, {})
    end
  end
end

return function(to, rows)
  local to_state = to == 'bound' and constants.BOUND or constants.ACTIVE
  local numbers, answer, has_changed, tenures, gangs = {}, {''}, false, {}, {}
  records.fetch_leases_of(rows)
  for i, row in ipairs(rows) do
    local pod, is_moving = row[1], nil
    local of_pod = records.leases[pod]
    if of_pod and to_state == constants.ACTIVE and of_pod.demand[DEMAND.NODE] ~= row[2] then of_pod = nil end
    if of_pod then is_moving = moves(of_pod, row, to_state) end
    if is_moving then
      move(pod, of_pod, to_state, tenures, gangs)
      has_changed = true
    end
    numbers[i] = of_pod and of_pod.numbers[NUMBERS.VERSION] or 0
    if is_moving ~= nil then
      numbers[i] = -1
      answer[#answer + 1] = of_pod.value
    end
  end
  for gang in pairs(gangs) do bind_gang(gang, tenures) end
  if has_changed then writes.write_changes(to) end
  journal.append('held', tenures)
  answer[1] = encode(numbers)
  return answer
end
