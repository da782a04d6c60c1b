-- Claims: devices that a preemption or a planned start reserves for a pod while the leases on them end, with the
-- node's ordinary resources that the pod needs, as far as they are free. For all other pods the device is in
-- exclusive use, but for those whose leases end by UNTIL. A pod's claim ends with its reservation on any node.
--   claims  hash  pod -> see FIELD
--   ledger  hash  claims: their number
-- RESOURCES: {name, amount, ...} that the pod requests; HELD: how much of each is reserved; UNTIL: the second by
-- which what is let onto the devices has to end, 0: nothing is.
-- MARK is added to D_EXCLUSIVE.
local claims = {
  MARK = 2, FIELD = {NODE = 1, NODE_NUMBER = 2, UUIDS = 3, RESOURCES = 4, HELD = 5, UNTIL = 6},
}
do -- A script may have 200 local names.
local FIELD, ended_claims = claims.FIELD, {}

function claims.of(pod)
  if claim_count == 0 then return nil end
  local claim = readable(call('HGET', PREFIX .. 'claims', pod))
  return claim[FIELD.UNTIL] and claim or nil
end

function claims.mark_devices(claim, is_claimed)
  for _, uuid in ipairs(claim[FIELD.UUIDS]) do
    local device = device_of(uuid)
    if device then
      device[D_EXCLUSIVE] = device[D_EXCLUSIVE] % 2 + (is_claimed and claims.MARK or 0)
      device[D_CLAIMED_UNTIL] = is_claimed and claim[FIELD.UNTIL] or 0
      changed_devices[uuid] = true
    end
  end
end

-- Nil for a node that was removed and added again: nothing is reserved on it any more.
function claims.node_of(claim)
  local node = node_of(claim[FIELD.NODE])
  return node and node[N_NUMBER] == claim[FIELD.NODE_NUMBER] and node or nil
end

local function add_reserved(claim, sign)
  local node, amounts = claims.node_of(claim), {}
  for i, reserved in ipairs(claim[FIELD.HELD]) do
    if reserved > 0 then append(amounts, claim[FIELD.RESOURCES][2 * i - 1], reserved) end
  end
  if node then add_to_node(node, amounts, sign) end
end

-- Reserve what is free of the resources that are still missing.
function claims.reserve_more(claim)
  local node = claims.node_of(claim)
  if not node then return end
  local amounts, more = placed_amounts(claim[FIELD.RESOURCES], node), {}
  for i, reserved in ipairs(claim[FIELD.HELD]) do
    local at, wanted = amounts[2 * i - 1], amounts[2 * i]
    local free = at > 0 and node[at] - node[at + 1] or 0
    local amount = math.max(0, math.min(wanted - reserved, free))
    if amount > 0 then
      append(more, claim[FIELD.RESOURCES][2 * i - 1], amount)
      claim[FIELD.HELD][i] = reserved + amount
    end
  end
  if #more > 0 then add_to_node(node, more, 1) end
end

function claims.put(pod, claim) call('HSET', PREFIX .. 'claims', pod, encode(claim)) end

-- Suspend the claim of a pod, so that it does not block the pod itself. Call `claims.resume` after.
function claims.suspend(pod)
  local claim = claims.of(pod)
  if claim then
    claims.mark_devices(claim, false)
    add_reserved(claim, -1)
  end
  return claim
end

function claims.resume(pod, claim, has_ended)
  if has_ended then
    ended_claims[#ended_claims + 1] = pod
    if claims.node_of(claim) then mark_freed(claim[FIELD.NODE]) end
  else
    claims.mark_devices(claim, true)
    add_reserved(claim, 1)
  end
end

function claims.save_count() call('HSET', PREFIX .. 'ledger', 'claims', call('HLEN', PREFIX .. 'claims')) end

-- Delete the claims that have ended; call this once the script cannot refuse any more.
function claims.delete_ended()
  if #ended_claims > 0 then
    call('HDEL', PREFIX .. 'claims', unpack(ended_claims))
    claims.save_count()
  end
end

-- Reserve the ordinary resources that were freed on these nodes for the pods that claim them.
function claims.reserve_freed(names)
  if claim_count == 0 then return end
  local is_freed = {}
  for _, name in ipairs(names) do is_freed[name] = true end
  for pod, claim in each_packed(PREFIX .. 'claims') do
    if is_freed[claim[FIELD.NODE] or false] then
      claims.reserve_more(claim)
      claims.put(pod, claim)
    end
  end
end
end
