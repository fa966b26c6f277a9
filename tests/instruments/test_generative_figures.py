"""The numbers of the figures of autoencoders and variational autoencoders, as the instruments show them."""

import pytest
import torch

from regard.instruments.codes import REACH, clouds, dots, pulls
from regard.instruments.generative_examples import (
    BETAS,
    CODE_SIZES,
    FAMILIES,
    autoencoder,
    digit_images,
    draw,
    generative_model,
    specs,
    variational,
)
from regard.instruments.generative_table import MEASURES, NAMES, courses, measurements, sharpness
from regard.objectives.reconstruction import gaussian_kl
from tests.instruments.test_figures import panel, shown

SIZE, MAPS, PULLS = "code-size", "dots-and-clouds", "two-pulls"


def drawn_values(found: dict, index: int) -> torch.Tensor:
    return torch.tensor(found["images"][index]["values"])


@pytest.mark.parametrize("name", specs())
def test_the_stored_weights_are_those_of_the_specs(name: str) -> None:
    model = generative_model(name)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.decode(torch.zeros(2, model.spec.latent)).shape == (2, 1, 8, 8)


@pytest.mark.ledger("fig.5.36")
@pytest.mark.parametrize("index", range(len(CODE_SIZES)))
def test_the_compression_is_that_of_the_input_that_is_shown(index: int) -> None:
    latent, numbers = CODE_SIZES[index], shown(SIZE, size=index)
    picture = drawn_values(panel(SIZE, "pictures", size=index), 0)
    assert numbers["numbers in the input"] == picture.numel() == 64
    assert numbers["saved: 1 − code / input"] == f"{100 * (1 - latent / 64):.2f} %"
    assert numbers["saved if the input had 784 pixels"] == f"{100 * (1 - latent / 784):.2f} %"
    code = panel(SIZE, "bars", size=index)["values"]
    assert len(code) == numbers["numbers in the code"] == latent
    image = digit_images().images[3:4]
    model = autoencoder(f"code-{latent}")
    assert code == pytest.approx(model.encode(image)[0].tolist(), rel=1e-4, abs=1e-5)
    assert torch.allclose(picture, (image[0, 0] + 1) / 2, atol=6e-3)
    error = float((model(image) - image).square().sum())
    assert numbers["‖x − x̂‖² of this image"] == pytest.approx(error, rel=1e-4)


@pytest.mark.ledger("fig.5.36", "ae.fig")
def test_the_two_figures_of_four_numbers_belong_to_two_inputs() -> None:
    numbers = shown(SIZE, size=2)
    assert (numbers["saved: 1 − code / input"], numbers["saved if the input had 784 pixels"]) == ("93.75 %", "99.49 %")


@pytest.mark.ledger("fig.5.36")
def test_more_numbers_lose_less_of_digits() -> None:
    curve = [y for _, y in panel(SIZE, "lines")["series"][0]["points"]]
    assert len(curve) == len(CODE_SIZES) and curve[0] > 3 * curve[-1]
    assert all(later < earlier + 0.02 for earlier, later in zip(curve, curve[1:], strict=False))


@pytest.mark.ledger("fig.5.37")
def test_a_place_is_decoded_by_both_models() -> None:
    place = {"across": 0.5, "up": -0.4}
    found, beta = panel(MAPS, "pictures", 2, **place), BETAS[2]
    codes = torch.tensor([[0.5, -0.4]])
    for index, image in enumerate(
        (
            autoencoder("dots").decode(dots().center + dots().unit * codes),
            variational(f"clouds-{beta:g}").decode(codes),
        )
    ):
        assert torch.allclose(drawn_values(found, index), (image[0, 0] + 1) / 2, atol=6e-3)
    for index in (0, 1):
        plane = panel(MAPS, "scatter", index, **place)
        assert plane["place"] == ["across", "up"] and plane["reach"] == REACH
        assert {"x": 0.5, "y": -0.4, "label": "here", "group": "here"} in plane["points"]


@pytest.mark.ledger("fig.5.37")
def test_digits_are_dots_of_the_autoencoder_and_clouds_of_the_vae() -> None:
    plain, variational_map = (panel(MAPS, "scatter", index)["points"][:-1] for index in (0, 1))
    assert not any("wide" in point for point in plain) and all("wide" in point for point in variational_map)
    inside = clouds(BETAS[2]).mean.abs().amax(1) <= REACH
    assert len(variational_map) == int(inside.sum()) > 40
    assert dots().mean.std(0).tolist() == pytest.approx([1, 1], abs=1e-5)


@pytest.mark.ledger("fig.5.38")
@pytest.mark.parametrize("beta", range(len(BETAS)))
def test_the_parts_of_the_kl_add_up_to_it(beta: int) -> None:
    numbers, image = shown(PULLS, beta=beta), digit_images(few=True).images[3:4]
    mean, log_variance = variational(f"clouds-{BETAS[beta]:g}").posterior(image)
    expected = float(gaussian_kl(mean, log_variance))
    assert sum(panel(PULLS, "bars", beta=beta)["values"]) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert numbers["KL of this cloud, nats"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    loss = numbers["‖x − x̂‖²"] + BETAS[beta] * expected
    assert numbers["loss: error + β KL"] == pytest.approx(loss, rel=1e-4)


@pytest.mark.ledger("fig.5.38")
def test_beta_trades_the_reconstruction_for_the_kl() -> None:
    errors, divergences = zip(*(pulls(beta) for beta in BETAS), strict=True)
    assert divergences == tuple(sorted(divergences, reverse=True))
    assert errors[-1] > errors[2] and divergences[0] > 3 * divergences[2] > 0
    widths = [float(clouds(beta).width.mean()) for beta in BETAS]
    assert widths[0] < 0.1 and widths == sorted(widths)


@pytest.mark.ledger("fig.5.38")
def test_generating_needs_no_encoder_and_draws_new_codes() -> None:
    first, second = (panel(PULLS, "pictures", 1, generated=draw) for draw in (1, 2))
    codes = torch.randn(10, 2, generator=torch.Generator().manual_seed(101))
    image = variational(f"clouds-{BETAS[2]:g}").decode(codes)[4]
    assert torch.allclose(drawn_values(first, 4), (image[0] + 1) / 2, atol=6e-3)
    assert first["images"] != second["images"] and len(first["images"]) == 10
    assert panel(PULLS, "pictures", 0, draw=1)["images"][2] != panel(PULLS, "pictures", 0, draw=2)["images"][2]


@pytest.mark.ledger("fig.5.39")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_cell_is_a_measurement_of_the_model_in_its_column(family: str) -> None:
    rows = panel("generative-table", "table")["rows"]
    cells = {row[0]: row[1 + FAMILIES.index(family)] for row in rows}
    found = measurements(family)
    for name, (label, _) in MEASURES.items():
        value = found.get(name)
        if value is None:
            assert family == "gan" and cells[label] == "no encoder"
        else:
            assert float(cells[label].split()[0]) == pytest.approx(value, abs=0.051)
        drawn = panel("generative-table", "bars", measure=name)
        values = dict(zip(drawn["labels"], drawn["values"], strict=True))
        assert values.get(NAMES[family]) == (value if value is None else pytest.approx(value, rel=1e-5))
    images = digit_images().images
    samples = draw(generative_model(family), images, 1000, 0)
    assert found["sharpness"] == pytest.approx(sharpness(samples) / sharpness(images), rel=1e-6)
    shares = [share for _, share in courses()[family]]
    assert found["steadiness"] == pytest.approx(100 * (max(shares) - min(shares))) and len(shares) == 20


@pytest.mark.ledger("fig.5.39")
def test_sharpness_is_1_for_the_data_and_less_for_a_blur() -> None:
    images = digit_images().images
    blurred = torch.nn.functional.avg_pool2d(images, 3, 1, 1)
    assert sharpness(blurred) < 0.6 * sharpness(images)
    assert measurements("vae")["sharpness"] < measurements("gan")["sharpness"]
