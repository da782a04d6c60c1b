-- Lists, sets and packed values.
local decode = cmsgpack.unpack
local M = {}

function M.append(list, ...)
  for i = 1, select('#', ...) do list[#list + 1] = (select(i, ...)) end
end

function M.set_of(list)
  local set = {}
  for _, name in ipairs(list) do set[name] = true end
  return set
end

-- For each pair of a flat list, its two values.
function M.each_pair(flat)
  local i = -1
  return function()
    i = i + 2
    return flat[i], flat[i + 1]
  end
end

-- What was packed, or as JSON; {} if it is missing or cannot be read.
function M.readable(value, parse)
  if not value then return {} end
  local is_read, content = pcall(parse or decode, value)
  return is_read and type(content) == 'table' and content or {}
end

return M
