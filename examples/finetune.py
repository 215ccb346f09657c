"""From a timm model to a fine-tuned, saved and loaded one with an encoding, on random images.

python examples/finetune.py
"""

import timm
import torch

import irpe

torch.manual_seed(0)
model = timm.create_model("deit_tiny_patch16_224", num_classes=4)  # pretrained=True for weights
images, labels = torch.randn(8, 3, 224, 224), torch.arange(8) % 4

model.eval()
with torch.inference_mode():
    before = model(images)
    irpe.equip(model, "product-contextual-k")
    print(f"equipping changed the output by {(model(images) - before).abs().max():.1e}")
print(irpe.summary(model))

model.train()
optimizer = torch.optim.AdamW(irpe.parameter_groups(model, 0.05, lr=3e-4))
for step in range(5):
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.3f}")

irpe.save_equipped(model, "finetuned")
loaded = irpe.load_equipped("finetuned")
with torch.inference_mode():
    assert torch.equal(loaded(images), model.eval()(images))
print("saved to ./finetuned and loaded again")
