-- Claims: devices kept for a pod while leases on them are taken back for it, and with them what it
-- needs of its node's ordinary resources, as far as that is free by now. All others see such a device
-- as held alone. A pod's claim ends with its reservation, wherever that is.
--   claims  hash  pod -> {node, the node's number, uuids, resources wanted {name, amount, ...}, and
--                 how much of each is kept}
--   meta    claims: how many there are
local CLAIMED = 2 -- added to D_ALONE
local claims_over = {}

local function claim_of(pod)
  if claimed == 0 then return nil end
  local value = call('HGET', P .. 'claims', pod)
  return value and decode(value) or nil
end

local function mark_devices(claim, is_claimed)
  for _, uuid in ipairs(claim[3]) do
    local device = device_of(uuid)
    if device then
      device[D_ALONE] = device[D_ALONE] % 2 + (is_claimed and CLAIMED or 0)
      changed_devices[uuid] = true
    end
  end
end

-- A node that was taken out and came back has forgotten what was kept of it.
local function claimed_node(claim)
  local node = node_of(claim[1])
  return node and node[N_NUMBER] == claim[2] and node or nil
end

local function count_kept(claim, sign)
  local node, amounts = claimed_node(claim), {}
  for i, kept in ipairs(claim[5]) do
    if kept > 0 then
      amounts[#amounts + 1] = claim[4][2 * i - 1]
      amounts[#amounts + 1] = kept
    end
  end
  if node then count_on_node(node, amounts, sign) end
end

-- Keep what is free by now of what is still missing.
local function keep_more(claim)
  local node = claimed_node(claim)
  if not node then return end
  local places, more = places_of(claim[4], node), {}
  for i, kept in ipairs(claim[5]) do
    local at, wanted = places[2 * i - 1], places[2 * i]
    local free = at > 0 and node[at] - node[at + 1] or 0
    local amount = math.max(0, math.min(wanted - kept, free))
    if amount > 0 then
      more[#more + 1] = claim[4][2 * i - 1]
      more[#more + 1] = amount
      claim[5][i] = kept + amount
    end
  end
  if #more > 0 then count_on_node(node, more, 1) end
end

local function put_claim(pod, claim)
  call('HSET', P .. 'claims', pod, pack(claim))
end

-- Nothing of a claim stands in its own pod's way. To be answered with `settle_claim`.
local function lift_claim(pod)
  local claim = claim_of(pod)
  if claim then
    mark_devices(claim, false)
    count_kept(claim, -1)
  end
  return claim
end

local function settle_claim(pod, claim, is_over)
  if is_over then
    claims_over[#claims_over + 1] = pod
    if claimed_node(claim) then free_on(claim[1]) end
  else
    mark_devices(claim, true)
    count_kept(claim, 1)
  end
end

local function count_claims()
  call('HSET', P .. 'ledger', 'claims', call('HLEN', P .. 'claims'))
end

-- Forget the claims that were settled as over; to be called once nothing can be withheld any more.
local function end_claims()
  if #claims_over > 0 then
    call('HDEL', P .. 'claims', unpack(claims_over))
    count_claims()
  end
end

-- What these nodes' leases gave back of ordinary resources is kept for who claims it.
local function keep_freed(names)
  if claimed == 0 then return end
  local here, found = {}, call('HGETALL', P .. 'claims')
  for _, name in ipairs(names) do here[name] = true end
  for i = 1, #found, 2 do
    local claim = decode(found[i + 1])
    if here[claim[1]] then
      keep_more(claim)
      put_claim(found[i], claim)
    end
  end
end
