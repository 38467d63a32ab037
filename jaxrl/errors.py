"""The errors a user of jaxrl may meet. Each message names the value and the rule that it broke."""


class JaxrlError(Exception):
    """Base of every error that jaxrl raises on purpose; the command line prints it as one line."""


class ConfigError(JaxrlError, ValueError):
    """A configuration field holds a value that its constraint forbids, or does not exist."""


class WeightVersionError(JaxrlError):
    """Weights are not those that their version claims, or a token carries a wrong version."""


class StaleDataError(JaxrlError):
    """A token to be trained on is older than `max_staleness` allows, or comes from the future."""


class RequestError(JaxrlError, ValueError):
    """A sampling request cannot be served: empty prompt, too long, bad token or parameter."""


class QueueFullError(JaxrlError):
    """As many requests wait as the driver allows: try again later. Nothing was queued."""


class NotReadyError(JaxrlError):
    """The server still loads its weights, or shuts down: try again later, or elsewhere."""


class AuthenticationError(JaxrlError):
    """The request does not carry the token that the server asks for."""


class NonFiniteError(JaxrlError):
    """An update met a loss or gradient that is not finite; the weights were left as they were."""


class DriverError(JaxrlError):
    """The decode driver is not running, or an engine step failed; the cause is chained."""


class RolloutError(JaxrlError):
    """An episode failed or returned a malformed trajectory; the message names its sample id."""


class DeadlineError(JaxrlError, TimeoutError):
    """A bounded wait ended without what it waited for; the message names what that was."""


class RewardError(JaxrlError):
    """A reward function raised or returned something that is not a finite number."""


class DataError(JaxrlError, ValueError):
    """A task, dataset, tokenizer or record is unknown, unreadable or malformed."""


class CheckpointError(JaxrlError):
    """A checkpoint or published version is missing, incomplete, or does not fit the model."""


class OutputError(JaxrlError, OSError):
    """The output directory cannot be written: missing permission, full disk, another run inside."""


class DistributedError(JaxrlError):
    """Processes of one job cannot work together; the message names the processes on each side."""


class CollectiveOrderError(DistributedError):
    """Processes are about to run different collectives, or the same ones in another order."""


class HangError(DistributedError):
    """A process waits for others that never arrived, died or stopped; the message says which."""


class CompileError(JaxrlError):
    """A program does not compile for the chip, most often because its memory is too small."""
